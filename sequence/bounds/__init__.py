"""How good a plan can be at all: bounds that no schedule of a joint graph beats."""
