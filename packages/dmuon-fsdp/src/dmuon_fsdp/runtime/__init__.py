"""What the runtime remembers: one parameter, one group, tickets, hooks."""
