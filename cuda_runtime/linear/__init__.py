"""Linear layers over weights that were laid out once for the unit that multiplies them."""
