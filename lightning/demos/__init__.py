"""Lightning's demos: modules and data that its examples and tests train. Imports lightning and below."""
