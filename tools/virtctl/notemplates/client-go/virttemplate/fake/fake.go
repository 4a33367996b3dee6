// Package fake is empty. Tests of virtctl, which do not run here, import it.
package fake
