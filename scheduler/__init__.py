"""Pure decisions about blocks and steps: no tensor, no Ray, no clock of its own."""
