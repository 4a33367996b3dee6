package convert

import (
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// Metrics of VM pods, by the names of KEP-2371. Their labels have the names and the order of containerd's, because a kubelet knows one
// description for each name.
var (
	labelKeys  = []string{"pod", "namespace", "container", "id", "image"}
	metricCPU  = &cri.MetricDescriptor{Name: "container_cpu_usage_seconds_total", Help: "Cumulative CPU time consumed in seconds.", LabelKeys: labelKeys}
	metricSet  = &cri.MetricDescriptor{Name: "container_memory_working_set_bytes", Help: "Memory in use, without cached files.", LabelKeys: labelKeys}
	metricAll  = &cri.MetricDescriptor{Name: "container_memory_usage_bytes", Help: "Memory in use, with all cached files.", LabelKeys: labelKeys}
	metricRSS  = &cri.MetricDescriptor{Name: "container_memory_rss", Help: "Memory in use that no file has.", LabelKeys: labelKeys}
	metricMiss = &cri.MetricDescriptor{Name: "container_memory_failures_total", Help: "Cumulative count of page faults.", LabelKeys: append(slices.Clone(labelKeys), "failure_type", "scope")}
	metricMost = &cri.MetricDescriptor{Name: "container_spec_memory_limit_bytes", Help: "Limit of the memory.", LabelKeys: labelKeys}
	metricDisk = &cri.MetricDescriptor{Name: "container_fs_usage_bytes", Help: "What the container has written.", LabelKeys: append(slices.Clone(labelKeys), "device")}
	metricFrom = &cri.MetricDescriptor{Name: "container_start_time_seconds", Help: "Start of the container since the epoch of Unix.", LabelKeys: labelKeys}
	metricRecv = &cri.MetricDescriptor{Name: "container_network_receive_bytes_total", Help: "Cumulative count of bytes received.", LabelKeys: append(slices.Clone(labelKeys), "interface")}
	metricSent = &cri.MetricDescriptor{Name: "container_network_transmit_bytes_total", Help: "Cumulative count of bytes transmitted.", LabelKeys: append(slices.Clone(labelKeys), "interface")}
)

// MetricDescriptors describes the metrics of VM pods.
func MetricDescriptors() []*cri.MetricDescriptor {
	return []*cri.MetricDescriptor{metricCPU, metricSet, metricAll, metricRSS, metricMiss, metricMost, metricDisk, metricFrom, metricRecv, metricSent}
}

// podContainer stands for the whole pod among the names of containers.
const podContainer = "POD"

// Metrics returns what the guest of r and its running containers use.
func Metrics(r vm.Record, st guest.Stats, at time.Time) *cri.PodSandboxMetrics {
	m := Config(r).GetMetadata()
	labels := func(container, id, image string, more ...string) []string {
		return append([]string{m.GetName(), m.GetNamespace(), container, id, image}, more...)
	}
	id := SandboxID(r.ID)
	whole := labels(podContainer, id, "")
	out := &cri.PodSandboxMetrics{PodSandboxId: id, Metrics: []*cri.Metric{
		counter(metricCPU, int64(st.CPUSeconds), at, whole), gauge(metricSet, st.MemoryUsed, at, whole),
		counter(metricRecv, st.NetworkRxBytes, at, labels(podContainer, id, "", "eth0")), counter(metricSent, st.NetworkTxBytes, at, labels(podContainer, id, "", "eth0")),
	}}
	for _, e := range r.Ephemeral {
		use, known := useOf(r, e, st)
		if !known || e.Record.Status.State != vm.ContainerRunning {
			continue
		}
		c := ListedContainer(r, e)
		own := func(more ...string) []string {
			return labels(c.GetMetadata().GetName(), c.GetId(), c.GetImage().GetImage(), more...)
		}
		all := []*cri.Metric{counter(metricCPU, int64(use.CPUSeconds), at, own()), gauge(metricSet, use.Memory, at, own()), gauge(metricAll, use.MemoryTotal, at, own())}
		if use.PageFaults > 0 { // else its guest does not tell
			all = append(all, gauge(metricRSS, use.Anonymous, at, own()),
				counter(metricMiss, use.PageFaults, at, own("pgfault", "container")), counter(metricMiss, use.MajorFaults, at, own("pgmajfault", "container")))
		}
		if w := use.Written; w != nil {
			all = append(all, gauge(metricDisk, w.Bytes, at, own("/")))
		}
		if limit := e.Spec.Resources; limit != nil && limit.MemoryLimit > 0 {
			all = append(all, gauge(metricMost, limit.MemoryLimit, at, own()))
		}
		if began := e.Record.Status.StartedAt; !began.IsZero() {
			all = append(all, gauge(metricFrom, began.Unix(), at, own()))
		}
		out.ContainerMetrics = append(out.ContainerMetrics, &cri.ContainerMetrics{ContainerId: c.GetId(), Metrics: all})
	}
	return out
}

func counter(d *cri.MetricDescriptor, value int64, at time.Time, labels []string) *cri.Metric {
	return &cri.Metric{Name: d.GetName(), Timestamp: at.UnixNano(), MetricType: cri.MetricType_COUNTER, LabelValues: labels, Value: number(value)}
}

func gauge(d *cri.MetricDescriptor, value int64, at time.Time, labels []string) *cri.Metric {
	return &cri.Metric{Name: d.GetName(), Timestamp: at.UnixNano(), MetricType: cri.MetricType_GAUGE, LabelValues: labels, Value: number(value)}
}
