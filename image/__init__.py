"""What goes into the container image: the pins, and the patch series with its tool."""
