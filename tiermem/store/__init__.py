"""The tiered store: records striped over host memory and storage paths."""
