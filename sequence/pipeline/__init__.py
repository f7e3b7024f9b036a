"""A pipeline of devices: the order of its actions, their replay on clocks, and where the chain is cut."""
