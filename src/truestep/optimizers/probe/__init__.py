"""The probe: measures how far an optimizer's update looks, what it keeps, and what it needs; evidence, not proof."""
