DISTRIBUTION = "holdfast"
