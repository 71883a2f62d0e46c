"""Tasks from texts: a graph of concepts over a corpus, samples of it, drafts with quotes, gates."""
