"""Language: BERT's pre-training and question answering, a transformer language model, and their data."""
