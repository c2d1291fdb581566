"""Plans on the ranks of a torch mesh: operators, their collectives, and losses over ranks."""
