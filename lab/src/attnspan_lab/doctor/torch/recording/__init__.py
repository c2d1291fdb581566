"""Records of a step: attention calls, operators, lines, and the work of the compiler."""
