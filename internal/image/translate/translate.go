// Package translate decides what an image name means: an image of a registry, a URL, an alias of the mappings, or one
// that is here already. It fetches nothing and stores nothing.
package translate
