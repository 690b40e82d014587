"""The step stream: steps in order, checked, executed and answered."""
