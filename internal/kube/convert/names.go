package convert

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// This file sets the host name, the hosts file and the DNS configuration of a guest.

// hostname returns the host name of the guest and its domain, "" if it has none. The default host name is the pod's name, cut
// to the length of a DNS label, because pod names may be longer. The pod may ask for another name or for the full name.
func hostname(pod *corev1.Pod, node Node) (name, domain string) {
	if o := pod.Spec.HostnameOverride; o != nil && *o != "" {
		return *o, ""
	}
	name = pod.Spec.Hostname
	if name == "" {
		name = strings.ReplaceAll(pod.Name, ".", "-")
	}
	if len(name) > 63 {
		name = name[:63]
	}
	name = strings.Trim(name, "-")
	if pod.Spec.Subdomain == "" {
		return name, ""
	}
	domain = pod.Spec.Subdomain + "." + pod.Namespace + ".svc." + cmp.Or(node.ClusterDomain, DefaultClusterDomain)
	if yes(pod.Spec.SetHostnameAsFQDN) {
		return name + "." + domain, ""
	}
	return name, domain
}

func hostAliases(pod *corev1.Pod) (out []vm.HostEntry) {
	for _, a := range pod.Spec.HostAliases {
		out = append(out, vm.HostEntry{IP: a.IP, Names: append([]string(nil), a.Hostnames...)})
	}
	return out
}

// Limits of resolvers, as a kubelet has them.
const (
	maxServers      = 3
	maxSearches     = 32
	maxSearchLength = 2048 // of all of them, with the spaces between
)

// dns returns how the guest of pod resolves names, nil if that is as its networks say. With the cluster's name servers it is as
// on every node: they come first, short names are looked up in the namespace, then in the cluster, then in the node's own
// domains. What the pod adds comes last, and an option of the pod replaces the one of that name.
func dns(pod *corev1.Pod, node Node) *vm.DNS {
	d, c := &vm.DNS{}, pod.Spec.DNSConfig
	switch pod.Spec.DNSPolicy {
	case corev1.DNSNone:
		d.Own = true
	case corev1.DNSDefault:
	default:
		if len(node.ClusterDNS) == 0 || pod.Spec.HostNetwork && pod.Spec.DNSPolicy != corev1.DNSClusterFirstWithHostNet {
			break
		}
		domain := cmp.Or(node.ClusterDomain, DefaultClusterDomain)
		d = &vm.DNS{
			Own: true, Offered: c == nil, Servers: slices.Clone(node.ClusterDNS),
			Searches: append([]string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}, node.Searches...), Options: []string{"ndots:5"},
		}
	}
	if c == nil {
		if !d.Own {
			return nil
		}
		c = &corev1.PodDNSConfig{}
	}
	d.Servers = distinct(append(d.Servers, c.Nameservers...))
	d.Searches = distinct(append(d.Searches, c.Searches...))
	for _, o := range c.Options {
		text := o.Name
		if o.Value != nil {
			text += ":" + *o.Value
		}
		d.Options = append(slices.DeleteFunc(d.Options, func(old string) bool { name, _, _ := strings.Cut(old, ":"); return name == o.Name }), text)
	}
	if len(node.ClusterDNS) > 0 {
		d.Servers, d.Searches = d.Servers[:min(len(d.Servers), maxServers)], fitting(d.Searches)
	}
	return d
}

func distinct(all []string) (out []string) {
	for _, s := range all {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// fitting returns the first domains, as many as resolvers use.
func fitting(domains []string) []string {
	length := -1
	for i, d := range domains {
		if length += 1 + len(d); i == maxSearches || length > maxSearchLength {
			return domains[:i]
		}
	}
	return domains
}
