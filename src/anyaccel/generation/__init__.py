"""Pictures from prompts: what is asked for, made, recorded in a file, and made again."""
