"""What is made of a network's rows instead of tokens: the rule, and the files that state it. No torch."""
