package contract

import "time"

// StickyScheduler is the profile of cocoon-scheduler that keeps VMs on the node that holds their state.
const StickyScheduler = "stickyvm"

// The values of KeySticky other than a duration.
const (
	StickyWait  = "wait"
	StickyNever = "never"
)

// Sticky says whether a VM stays on the node that holds its state, and when this ends. The zero value is not sticky.
type Sticky struct {
	Asked bool
	Never bool           // only a person can end the claim on the node
	Wait  *time.Duration // how long a node may be unavailable before the claim on it ends; nil: no limit
}

// ParseSticky reads what a pod asks for. A VM that hibernates when its pod is deleted, or shuts down when it is evicted, stays on its node,
// with the value wait unless the pod gives another. The error, if any, is an Errors.
func ParseSticky(annotations map[string]string) (Sticky, error) {
	switch v := annotations[KeySticky]; v {
	case "":
		return Sticky{Asked: HibernatesOnDelete(annotations) || annotations[KeyEvictionPolicy] == string(EvictShutdown)}, nil
	case StickyWait:
		return Sticky{Asked: true}, nil
	case StickyNever:
		return Sticky{Asked: true, Never: true}, nil
	default:
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 || d%time.Second != 0 {
			return Sticky{}, Errors{{Key: KeySticky, Value: v, Reason: "must be wait, never, or whole seconds to wait, such as 10m"}}
		}
		return Sticky{Asked: true, Wait: &d}, nil
	}
}
