package node

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/kube/probe"
)

// Pressure begins below these limits. They are the kubelet's, except leastDisk: a big disk that is nearly full still has room
// for VMs. Pressure ends only when 1.5 times the limit is free, so that a node near the limit does not flap.
const (
	leastMemory = 100 << 20 // bytes available
	leastDisk   = 2 << 30   // bytes available, or 5 % of a smaller disk
	leastInodes = 5         // per cent
	leastPIDs   = 10        // per cent
)

// Conditions that only virtual nodes have.
const (
	// ConditionICMP says whether guests are pinged. If not, a guest counts as ready as soon as its address is known.
	ConditionICMP corev1.NodeConditionType = "cocoonstack.io/ICMPProbe"
	// ConditionHypervisor says whether the default hypervisor of VMs is usable.
	ConditionHypervisor corev1.NodeConditionType = "cocoonstack.io/HypervisorUsable"
	// ConditionComplete says whether the engine has a record of every VM on the machine.
	ConditionComplete corev1.NodeConditionType = "cocoonstack.io/StateComplete"
)

// hypervisor is the engine's report about its drivers.
type hypervisor struct {
	Hypervisors
	asked bool  // false: the engine has not answered yet
	err   error // why the default one is unusable
}

// conditions returns the conditions of the node. It is pure, except that it calls Healthy. A transition time changes only with
// the status.
func (n *Node) conditions(before []corev1.NodeCondition, u usage, measured error, hv hypervisor, now time.Time) []corev1.NodeCondition {
	var out []corev1.NodeCondition
	add := func(kind corev1.NodeConditionType, on bool, reason, message string) {
		c := corev1.NodeCondition{
			Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message,
			LastHeartbeatTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(now),
		}
		if on {
			c.Status = corev1.ConditionTrue
		}
		if i := index(before, kind); i >= 0 && before[i].Status == c.Status {
			c.LastTransitionTime = before[i].LastTransitionTime
		}
		out = append(out, c)
	}
	switch err := n.cfg.Healthy(); {
	case err != nil:
		add(corev1.NodeReady, false, "EngineUnreachable", err.Error())
	case hv.err != nil:
		add(corev1.NodeReady, false, "HypervisorUnusable", hv.err.Error())
	default:
		add(corev1.NodeReady, true, "KubeletReady", "the VM engine answers")
	}
	switch i := index(before, ConditionHypervisor); {
	case hv.err != nil:
		add(ConditionHypervisor, false, "ProbeFailed", hv.err.Error())
	case hv.asked:
		add(ConditionHypervisor, true, "ProbeSucceeded", hv.Default)
	case i >= 0:
		out = append(out, before[i])
	}
	switch i := index(before, ConditionComplete); {
	case n.strays != nil && *n.strays > 0:
		add(ConditionComplete, false, "UnknownVMs", fmt.Sprintf("%d VMs of the machine are not in the journal; run `cocoon recover` on the machine to list, adopt or remove them", *n.strays))
	case n.strays != nil:
		add(ConditionComplete, true, "EveryVMOnRecord", "all VMs of the machine are in the journal")
	case i >= 0:
		out = append(out, before[i])
	}
	if measured != nil {
		return append(out, carry(before, corev1.NodeReady, ConditionHypervisor, ConditionComplete)...) // pressure is not known: keep the earlier conditions
	}
	// low reports whether free is below the limit. If there is pressure already, the limit is 1.5 times as high.
	low := func(kind corev1.NodeConditionType, free, least int64) bool {
		if i := index(before, kind); i >= 0 && before[i].Status == corev1.ConditionTrue {
			least += least / 2
		}
		return free < least
	}
	disk := min(int64(leastDisk), u.disk/20)
	pressure(add, corev1.NodeMemoryPressure, low(corev1.NodeMemoryPressure, u.memFree, leastMemory), "KubeletHasInsufficientMemory", "KubeletHasSufficientMemory",
		fmt.Sprintf("less than %d MiB of memory are available", leastMemory>>20))
	why := fmt.Sprintf("less than %d MiB of disk are available", disk>>20)
	full := low(corev1.NodeDiskPressure, u.diskFree, disk)
	if !full && u.inodes > 0 {
		full, why = low(corev1.NodeDiskPressure, u.inodeFree, u.inodes/100*leastInodes), fmt.Sprintf("less than %d %% of the disk's inodes are free", leastInodes)
	}
	pressure(add, corev1.NodeDiskPressure, full, "KubeletHasDiskPressure", "KubeletHasNoDiskPressure", why)
	pressure(add, corev1.NodePIDPressure, u.pidsCeiling > 0 && low(corev1.NodePIDPressure, u.pidsCeiling-u.pids, u.pidsCeiling/100*leastPIDs),
		"KubeletHasInsufficientPID", "KubeletHasSufficientPID", fmt.Sprintf("less than %d %% of all process ids are free", leastPIDs))
	if err := n.network(); err != nil {
		add(corev1.NodeNetworkUnavailable, true, "NetworkPoliciesUnknown", err.Error())
	} else {
		add(corev1.NodeNetworkUnavailable, false, "RouteCreated", "VMs have their own addresses")
	}
	switch n.cfg.ICMP {
	case probe.SocketRaw:
		add(ConditionICMP, true, "RawSocket", "guests are ready when they answer a ping")
	case probe.SocketPing:
		add(ConditionICMP, true, "PingSocket", "guests are ready when they answer a ping")
	default:
		add(ConditionICMP, false, "NoRawSocket", "guests cannot be pinged, so an address alone makes them ready; grant CAP_NET_RAW")
	}
	return out
}

func (n *Node) network() error {
	if n.cfg.Network == nil {
		return nil
	}
	return n.cfg.Network()
}

func pressure(add func(corev1.NodeConditionType, bool, string, string), kind corev1.NodeConditionType, on bool, bad, good, why string) {
	if on {
		add(kind, true, bad, why)
		return
	}
	add(kind, false, good, "")
}

func index(all []corev1.NodeCondition, kind corev1.NodeConditionType) int {
	return slices.IndexFunc(all, func(c corev1.NodeCondition) bool { return c.Type == kind })
}

// carry returns the earlier conditions without those of the kinds anew.
func carry(before []corev1.NodeCondition, anew ...corev1.NodeConditionType) []corev1.NodeCondition {
	return slices.DeleteFunc(slices.Clone(before), func(c corev1.NodeCondition) bool { return slices.Contains(anew, c.Type) })
}

// alike reports whether two sets are equal, ignoring times.
func alike(a, b []corev1.NodeCondition) bool {
	return slices.EqualFunc(a, b, func(x, y corev1.NodeCondition) bool {
		return x.Type == y.Type && x.Status == y.Status && x.Reason == y.Reason && x.Message == y.Message
	})
}
