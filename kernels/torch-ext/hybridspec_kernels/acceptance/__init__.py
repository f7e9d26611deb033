"""What a verified block emits: the accepted prefix, cut at EOS and at the output budget."""
