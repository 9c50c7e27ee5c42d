"""The words every process shares: services, frozen messages, their codec, the error tree."""
