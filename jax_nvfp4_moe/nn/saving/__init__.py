"""Save, restore and reshard modules and weights."""
