"""The persistent batch: the rows of live sequences, and what one step computes of them."""
