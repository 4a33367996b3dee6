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
	metricRecv = &cri.MetricDescriptor{Name: "container_network_receive_bytes_total", Help: "Cumulative count of bytes received.", LabelKeys: append(slices.Clone(labelKeys), "interface")}
	metricSent = &cri.MetricDescriptor{Name: "container_network_transmit_bytes_total", Help: "Cumulative count of bytes transmitted.", LabelKeys: append(slices.Clone(labelKeys), "interface")}
)

// MetricDescriptors describes the metrics of VM pods.
func MetricDescriptors() []*cri.MetricDescriptor {
	return []*cri.MetricDescriptor{metricCPU, metricSet, metricRecv, metricSent}
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
		i := slices.IndexFunc(st.Containers, func(c guest.ContainerStats) bool { return c.Name == e.Spec.Name })
		if i < 0 || e.Record.Status.State != vm.ContainerRunning {
			continue
		}
		c := ListedContainer(r, e)
		own := labels(c.GetMetadata().GetName(), c.GetId(), c.GetImage().GetImage())
		out.ContainerMetrics = append(out.ContainerMetrics, &cri.ContainerMetrics{ContainerId: c.GetId(), Metrics: []*cri.Metric{
			counter(metricCPU, int64(st.Containers[i].CPUSeconds), at, own), gauge(metricSet, st.Containers[i].Memory, at, own),
		}})
	}
	return out
}

func counter(d *cri.MetricDescriptor, value int64, at time.Time, labels []string) *cri.Metric {
	return &cri.Metric{Name: d.GetName(), Timestamp: at.UnixNano(), MetricType: cri.MetricType_COUNTER, LabelValues: labels, Value: number(value)}
}

func gauge(d *cri.MetricDescriptor, value int64, at time.Time, labels []string) *cri.Metric {
	return &cri.Metric{Name: d.GetName(), Timestamp: at.UnixNano(), MetricType: cri.MetricType_GAUGE, LabelValues: labels, Value: number(value)}
}
