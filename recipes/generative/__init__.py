"""Generated images: DCGAN, its discriminator alone, and the images they train on."""
