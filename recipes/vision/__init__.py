"""Image classification: torchvision's networks, and the data sets they train on."""
