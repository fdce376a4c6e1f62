"""What the paper describes: masks, positions, attention, layers, and the Transformer made of them."""
