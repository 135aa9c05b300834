"""What keeps the house: its figures, the prose of its pages, the reference pages, the board's pictures."""
