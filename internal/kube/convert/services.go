package convert

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// serviceEnv returns the variables through which containers of pod find Services, as on every Kubernetes node: always the
// Service of the API server, and the Services of pod's namespace unless enableServiceLinks is false. If the names of two
// Services give the same variable, the Service with the later name in alphabetical order wins.
func serviceEnv(pod *corev1.Pod, services []*corev1.Service) (env []vm.EnvVar) {
	links := pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks
	byName := map[string]*corev1.Service{}
	for _, s := range services {
		switch {
		case net.ParseIP(s.Spec.ClusterIP) == nil || len(s.Spec.Ports) == 0: // a headless Service, or one without ports
		case s.Namespace == pod.Namespace && links:
			byName[s.Name] = s
		case s.Namespace == corev1.NamespaceDefault && s.Name == apiService && byName[apiService] == nil:
			byName[s.Name] = s
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		env = append(env, variables(byName[name])...)
	}
	return env
}

// apiService is the Service of the API server.
const apiService = "kubernetes"

// variables returns the variables of one Service: its address, and for each port the variables of Docker links.
func variables(s *corev1.Service) []vm.EnvVar {
	host, ports := s.Spec.ClusterIP, s.Spec.Ports
	prefix := envName(s.Name)
	env := []vm.EnvVar{
		{Name: prefix + "_SERVICE_HOST", Value: host},
		{Name: prefix + "_SERVICE_PORT", Value: strconv.Itoa(int(ports[0].Port))},
	}
	for _, p := range ports {
		if p.Name != "" {
			env = append(env, vm.EnvVar{Name: prefix + "_SERVICE_PORT_" + envName(p.Name), Value: strconv.Itoa(int(p.Port))})
		}
	}
	for i, p := range ports {
		protocol := cmp.Or(p.Protocol, corev1.ProtocolTCP)
		port, lower := strconv.Itoa(int(p.Port)), strings.ToLower(string(protocol))
		url := lower + "://" + net.JoinHostPort(host, port)
		if i == 0 {
			env = append(env, vm.EnvVar{Name: prefix + "_PORT", Value: url})
		}
		link := prefix + "_PORT_" + port + "_" + string(protocol)
		env = append(env, vm.EnvVar{Name: link, Value: url}, vm.EnvVar{Name: link + "_PROTO", Value: lower},
			vm.EnvVar{Name: link + "_PORT", Value: port}, vm.EnvVar{Name: link + "_ADDR", Value: host})
	}
	return env
}

// envName converts the name of a cluster object to the name of an environment variable.
func envName(name string) string { return strings.ToUpper(strings.ReplaceAll(name, "-", "_")) }
