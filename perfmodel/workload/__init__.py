"""What is to be computed: the model's shape, the job, and the operators that follow from them."""
