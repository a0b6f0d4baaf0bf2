"""The process that holds a model, its pipe, and its client and supervisor in the parent process."""
