"""PaSE (Elango, IPDPS 2021): its graphs, its cost, its space, its figure."""
