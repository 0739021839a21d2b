"""Pure decisions: use traces, prefetch, division of budgets."""
