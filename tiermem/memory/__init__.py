"""Memory under a budget: the ledger that knows every byte, arenas, and what the machine has."""
