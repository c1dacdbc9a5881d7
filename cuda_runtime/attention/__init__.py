"""How a token attends to the cells of its sequence: one operator, several realisations."""
