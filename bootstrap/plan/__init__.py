"""``p2p-co2 plan``: what a run will cost and whether the links are enough, before anybody is invited.

The arithmetic is ``p2p_co2.planning``'s; here the figures are gathered (``plan``: the model is built, its
inner step measured, links are read) and shown, in words and as a ``picture``. Nothing is published, dialled or
written but the picture that was asked for; every figure that was measured, given or assumed is said to be
so."""
