package nodejson

// Error is the format in which `cocoon --error-fd` reports a failure: one line, on a separate descriptor, so that it
// never mixes with the output of a command in a guest.
type Error struct {
	Class   string `json:"class"` // as errdefs.Class spells it
	Message string `json:"message"`
}

// Control is one line of `cocoon vm exec --control-fd`.
type Control struct {
	Rows   uint16 `json:"rows,omitempty"` // with Cols: the terminal's new size
	Cols   uint16 `json:"cols,omitempty"`
	Signal int    `json:"signal,omitempty"` // POSIX number, for the command
}

// TagDigest is the output of `cocoon snapshot remote digest`.
type TagDigest struct {
	Digest string `json:"digest"` // sha256:<hex> of the manifest
}
