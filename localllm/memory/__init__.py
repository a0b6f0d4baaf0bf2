"""System memory: reading it (system), an account per memory pool (account), and whether models fit
(verdict)."""
