"""Time and cost of a recipe on a cluster, before they are paid: pure, without torch or Ray."""
