"""Where the optimizers meet other frameworks; each module needs the library it is named after."""
