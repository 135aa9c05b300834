"""``p2p-co2 plan``: what a run will cost and whether the links are enough, before anybody is invited.

The arithmetic is ``p2p_co2.planning``'s; here the figures are gathered (the model is built, its inner step
measured, links are read) and shown. Every figure that was measured, given or assumed is said to be so."""
