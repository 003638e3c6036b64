"""PaSE (Elango, IPDPS 2021): its graphs, cost function, configurations and search."""
