"""Memory: one reader of the system (system), one account a place (account), one verdict whether
something fits (verdict)."""
