"""A peer that trains one stage of a model that is cut into stages."""
