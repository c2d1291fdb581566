"""attnspan in models of other libraries. Import the module that is named after the library."""
