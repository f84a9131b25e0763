"""Names of params in the unwrapped model."""

from __future__ import annotations

import pytest

from truestep.words.names import clean, group_slot, labelled


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("weight", "weight"),
        ("_orig_mod.weight", "weight"),
        ("layers.0._orig_mod.attention._orig_mod.q", "layers.0.attention.q"),
        ("_fsdp_wrapped_module.layers.3._fsdp_wrapped_module._checkpoint_wrapped_module.bias", "layers.3.bias"),
        ("_orig_mod", "_orig_mod"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("layers._orig_mod_2.weight", "layers._orig_mod_2.weight"),
    ],
)
def test_wrappers_are_removed_at_any_depth_and_only_they(wrapped, name):
    assert clean(wrapped) == name
    assert clean(name) == name


def test_a_child_called_module_keeps_its_name():
    assert clean("module.weight") == "module.weight"
    assert clean("encoder.module.weight") == "encoder.module.weight"


def test_groups_and_several_models_have_names_of_their_own():
    assert group_slot("0") == "@group/0"
    assert labelled("generator", "0.weight") == "generator.0.weight"
    assert labelled(None, "0.weight") == "0.weight"
