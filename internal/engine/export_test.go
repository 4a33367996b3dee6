package engine

import "slices"

// Steps returns the words of the steps of each operation that lead to its end. Steps that only an undo enters, and the
// operation that only recovery runs, are not among them.
func Steps() map[string][]string {
	out := map[string][]string{}
	for _, o := range operations {
		words := slices.DeleteFunc(o.words(), func(w string) bool { return w == stepUndo || w == stepAdopt })
		if len(words) > 0 {
			out[o.id()] = words
		}
	}
	return out
}
