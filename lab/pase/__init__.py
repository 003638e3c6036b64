"""Figure 6 of the PaSE paper and the tables of its experiment (`make pase-report`)."""
