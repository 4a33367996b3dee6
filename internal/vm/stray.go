package vm

// Stray is what a host has of a VM that the journal does not know. It is left as it is (a running guest keeps running) until
// somebody asks for it by its id.
type Stray struct {
	ID     ID       `json:"id"`
	Name   string   `json:"name,omitempty"`   // from its folder; "" if the folder does not say
	State  State    `json:"state,omitempty"`  // from its folder, too
	Dirs   []string `json:"dirs,omitempty"`   // folders
	Taps   []string `json:"taps,omitempty"`   // of its NICs
	PIDs   []int    `json:"pids,omitempty"`   // of its hypervisor
	Reason string   `json:"reason,omitempty"` // why it is kept and not removed, one sentence
}
