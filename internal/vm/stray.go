package vm

// Stray is what a host has of a VM that its journal does not know. It is left as it is, its guest running if it does, until
// somebody asks for it by its id.
type Stray struct {
	ID     ID       `json:"id"`
	Name   string   `json:"name,omitempty"`   // as its folder says; "": that says nothing
	State  State    `json:"state,omitempty"`  // likewise
	Dirs   []string `json:"dirs,omitempty"`   // folders
	Taps   []string `json:"taps,omitempty"`   // of its interfaces
	PIDs   []int    `json:"pids,omitempty"`   // of its hypervisor
	Reason string   `json:"reason,omitempty"` // why it is kept aside, one sentence
}
