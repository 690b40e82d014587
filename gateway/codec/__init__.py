"""Messages into values and back. Only this package and the fronts know the generated code."""
