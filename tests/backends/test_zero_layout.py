"""ZeRO's flat tensors: which range of which param lies where."""

from truestep.backends.zero_layout import offsets, overlap


def test_an_overlap_is_given_in_both_coordinates():
    lengths, size = [5, 1, 8, 3], 6
    places = []
    for part in range(3):
        for index, (offset, length) in enumerate(zip(offsets(lengths), lengths, strict=True)):
            into, start, stop = overlap(offset, length, part * size, part * size + size)
            places += [(index, start + step, part * size + into + step) for step in range(stop - start)]
    expected = [(index, inside) for index, length in enumerate(lengths) for inside in range(length)]
    assert places == [(*where, place) for place, where in enumerate(expected)]
