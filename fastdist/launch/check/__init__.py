"""`fastdist check`"""
